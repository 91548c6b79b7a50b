from engine.runtime.child import run_child

run_child(__package__)
