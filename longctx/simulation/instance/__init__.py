"""One engine in virtual time: the core that serves, and what stands for its devices, tokens and host."""
