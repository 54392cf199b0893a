"""Mixtures of experts: routing, and the matmuls of rows with the experts they are sent to."""
