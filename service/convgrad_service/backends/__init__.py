"""What runs plans: one package per kind of device."""
