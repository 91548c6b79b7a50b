from engine.runtime.child.child import run_child

run_child(__package__)
