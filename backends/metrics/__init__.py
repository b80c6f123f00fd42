"""The table of all metrics, their publication on the metrics page, and `mooncake status`."""
