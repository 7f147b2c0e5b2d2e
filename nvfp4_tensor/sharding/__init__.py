"""Which part of a tensor a rank holds: sharding layouts, sequence sharding, NVFP4 weights in FSDP2's all-gather."""
