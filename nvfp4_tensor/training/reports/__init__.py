"""Reports about a model that trains: what each linear does, and what quantization does to it."""
