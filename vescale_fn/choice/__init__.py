"""Layouts that are found, priced and carried out: of a step recorded once, as for one device."""
