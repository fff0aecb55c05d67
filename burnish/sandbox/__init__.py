"""Run programs that a model wrote: in bubblewrap, through a service, or with resource limits only.
Reading order: base, make, process, bubblewrap, unsafe_subprocess, service."""
