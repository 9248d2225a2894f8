"""What was measured on a device: corrections of the kernels' cost models, and tuned layers."""
