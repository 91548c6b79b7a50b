"""Compiling new grammars in a sandbox, whose CPU time and memory are limited, before the scheduler compiles them."""
