"""Backends run plans; there is one package per kind of device."""
