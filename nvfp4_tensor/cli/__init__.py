"""What the commands of ``nvfp4`` and ``python -m nvfp4_tensor`` do, a file each; their arguments: ``nvfp4_cli``."""
