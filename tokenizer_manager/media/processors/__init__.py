"""One file for each family: an image to the tiles that its tower sees, equal to the pixels of transformers."""
