"""Classes, jobs and the policy that gives a job's flow its class. Pure: no I/O, no clock reads."""
