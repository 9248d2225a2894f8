"""What is measured and counted of each request, and how it is exported."""
