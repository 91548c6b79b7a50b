"""One module per structure: a decoder or encoder put together from layers."""
