"""The offload tier of an instance: KV in host memory and on a disk that its cache has no room for."""
