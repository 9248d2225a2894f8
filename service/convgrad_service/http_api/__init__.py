"""HTTP in front of the dataplane. `app.app_on` makes the application; start reading there."""
