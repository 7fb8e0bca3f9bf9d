"""How several ranks train together: token balancing, gradient compression, local SGD, stragglers, and their options."""
