"""The HTTP API. `app.app_on` builds the application; start reading there."""
