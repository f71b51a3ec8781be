"""Captures that are wrong on purpose: what must not get past the self-test and the checks of each prompt."""
