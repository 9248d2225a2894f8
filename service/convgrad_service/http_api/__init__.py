"""HTTP in front of the dataplane. `app.create_app` makes the application; start reading there."""
