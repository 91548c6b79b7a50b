"""`engine simulate`: the serving scheduler on a model of the device."""
