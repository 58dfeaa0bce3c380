package agent

import "github.com/fingerpost/fingerpost/xds"

// spoil changes what a feed publishes. It is set where the program was built
// with the tag "faults", which tests alone do; see spoil_faults.go. It is called
// with the feed's lock held.
var spoil func(*feed, xds.Update) xds.Update
