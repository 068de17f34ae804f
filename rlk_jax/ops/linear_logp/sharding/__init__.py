"""What only a head needs of a mesh: shards of the vocabulary, in shard_map, in pjit programs, over processes."""
