"""fencepost: leases say when work may be taken back, generations say whose write counts."""
