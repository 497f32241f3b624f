//! Bytes to peers: shared memory, TCP, loopback.
