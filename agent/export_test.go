package agent

import "github.com/fingerpost/fingerpost/agent/collect"

// Tune lets a test change how pods are asked, before the collector is made.
func (c *Config) Tune(f func(*collect.Options)) { c.tune = f }
