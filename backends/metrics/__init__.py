"""Every number that is shown: the table of metrics, pages of them, `mooncake status`."""
