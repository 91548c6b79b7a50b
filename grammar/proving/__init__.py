"""Compiling new grammars in a process that can be killed, before the scheduler compiles them."""
