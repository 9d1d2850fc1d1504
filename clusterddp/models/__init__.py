"""Networks: built in, from the recipes, Keras' and a user's own."""
