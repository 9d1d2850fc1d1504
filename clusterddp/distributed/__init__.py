"""How ranks meet, agree, watch each other and part."""
