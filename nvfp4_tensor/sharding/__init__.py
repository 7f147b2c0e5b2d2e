"""What part of a tensor a rank has: shard layouts, sequence shards, NVFP4 weights on FSDP2's all-gather."""
