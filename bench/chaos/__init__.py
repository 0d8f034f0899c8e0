"""Chaos: training whose ranks are killed, stopped, cut off and starved at random, and go on all the same."""
