"""The page for a browser at `/`: a chat and the live requests; its static files are in `web/`."""
