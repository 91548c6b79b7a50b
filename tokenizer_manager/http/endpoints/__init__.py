"""The handlers of each route."""
