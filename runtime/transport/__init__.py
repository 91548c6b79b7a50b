"""Sockets between processes: ZMQ over ipc on one machine, encrypted TCP between machines."""
