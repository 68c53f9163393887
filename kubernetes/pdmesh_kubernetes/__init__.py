"""Parts of pdmesh for Kubernetes: instances as pods, and the lease of a standby scheduler. ``docs/kubernetes.md``."""
