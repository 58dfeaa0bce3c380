package observe

// OneByOne makes the observer read as where the kernel knows no batches.
func (o *Observer) OneByOne() { o.oneByOne = true }

// Batches tells whether it reads in batches.
func (o *Observer) Batches() bool { return !o.oneByOne }
