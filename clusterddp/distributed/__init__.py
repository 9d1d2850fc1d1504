"""Ranks meet, agree, watch each other and part."""
