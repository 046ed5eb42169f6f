"""Jobs on a cluster's network: leaf and spine, collectives, priorities across hosts."""
