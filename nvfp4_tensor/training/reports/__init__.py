"""Reports on a model that trains: the recipe of each linear, and its quantization errors."""
