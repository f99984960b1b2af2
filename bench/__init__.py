"""`glimmer bench`: what an op or a model needs, against this machine's limits and other projects.

Every figure is the median of samples that take turns with the peers' and with probes of the machine
(memory read, arithmetic peak, freedom of the core), on arguments that rotate through more memory
than the caches hold, of a result that was checked against the reference first.
"""
