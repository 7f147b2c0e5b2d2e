"""What bits a tensor becomes: the format, the spec and the reference. torch alone."""
