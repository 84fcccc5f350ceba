"""A discrete-event simulation of engines that larger machines would run; see docs/scale.md."""
