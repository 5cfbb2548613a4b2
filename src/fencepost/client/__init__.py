"""The worker's side: claims, renewal, handlers. Imports no store and no server."""
