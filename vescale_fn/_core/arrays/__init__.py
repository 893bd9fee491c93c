"""The global view: `Array`, its interpreter, resharding, sharding rules."""
