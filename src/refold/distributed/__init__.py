"""Work spread over devices: heads or time cut into shards."""
