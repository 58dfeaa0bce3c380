//go:build race

package ads_test

const raceEnabled = true
