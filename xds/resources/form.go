package resources

import "github.com/fingerpost/fingerpost/xds"

// Form is one of the forms in which the route table of a namespace is written.
// They differ in how the cluster of a call is computed for which no route
// speaks.
type Form uint8

// The forms.
const (
	// AllClusters is for clients that have all clusters. It is the zero value.
	AllClusters Form = iota
	// ShapeOne is the table of shape 1.
	ShapeOne
	// OnDemand is for clients that fetch their clusters on demand. Envoy asks for
	// each name that it does not have.
	OnDemand
	// Asking is for those of them that have asked for many names which nobody
	// has: Envoy asks for no further one.
	Asking

	numForms = iota
)

// OnDemand tells whether clients of the form fetch their clusters.
func (f Form) OnDemand() bool { return f == OnDemand || f == Asking }

// scope is where the table of a namespace stands.
func (f Form) scope(namespace string) xds.Scope {
	if f == ShapeOne {
		return xds.NamespaceScope(namespace)
	}
	return xds.TableScope(namespace, f.String())
}

// String is how the table's code knows the form.
func (f Form) String() string {
	return [numForms]string{AllClusters: "all", ShapeOne: "shape 1", OnDemand: "on-demand", Asking: "asking"}[f]
}
