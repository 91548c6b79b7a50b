"""The description of the API: `/openapi.json`, and `/docs` made from it."""
