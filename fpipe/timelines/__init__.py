"""Timelines of effects, predicted or measured: causes of idle time, comparisons, drawings and exports. No torch."""
