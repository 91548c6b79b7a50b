from engine.launch.child.child import run_child

run_child(__package__)
