{{- define "lmcache-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, unless it says the chart's already. */}}
{{- define "lmcache-operator.fullname" -}}
{{- $name := include "lmcache-operator.name" . }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "lmcache-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "lmcache-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmcache-operator.labels" -}}
{{ include "lmcache-operator.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: lmcache-cluster
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "lmcache-operator.monitoringLabels" -}}
{{- include "lmcache-operator.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "lmcache-operator.serviceAccountName" -}}
{{- $default := ternary (include "lmcache-operator.fullname" .) "default" .Values.serviceAccount.create }}
{{- default $default .Values.serviceAccount.name }}
{{- end }}

{{- define "lmcache-operator.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag }}
{{- with .Values.image.digest }}{{ $.Values.image.repository }}@{{ . }}{{ else }}{{ .Values.image.repository }}:{{ $tag }}{{ end }}
{{- end }}

{{/* Stops before anything is made; without a cluster, as in `helm template`, there is nothing to look up. */}}
{{- define "lmcache-operator.checkNamespaces" -}}
{{- if lookup "v1" "Namespace" "" "kube-system" }}
{{- range .Values.watchNamespaces }}
{{- if not (lookup "v1" "Namespace" "" .) }}
{{- fail (printf "watchNamespaces: there is no namespace %q: create it first (kubectl create namespace %s)" . .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The API version of MutatingAdmissionPolicy to use; empty: none. */}}
{{- define "lmcache-operator.policyVersion" -}}
{{- $group := "admissionregistration.k8s.io" }}
{{- if eq (toString .Values.injection.enabled) "false" }}
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) }}v1
{{- else if .Capabilities.APIVersions.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) }}v1beta1
{{- else if eq (toString .Values.injection.enabled) "true" }}
{{- fail "injection.enabled: the API server has no MutatingAdmissionPolicy: it needs Kubernetes 1.36, or 1.34 with the feature gate MutatingAdmissionPolicy and --runtime-config=admissionregistration.k8s.io/v1beta1=true" }}
{{- end }}
{{- end }}

{{/* What the operator may do to namespaced objects: in one namespace by a Role, in all by a ClusterRole. */}}
{{- define "lmcache-operator.rules" -}}
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters]
  verbs: [get, list, watch]
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters/status]
  verbs: [patch]
# Owner references that block deletion ask for it where that admission plugin is on (OpenShift).
- apiGroups: [lmcache.io]
  resources: [lmcacheclusters/finalizers]
  verbs: [update]
# What clusters are made of: the kinds of the operator's components (kinds_of in lmcache_operator/components).
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch]
# Deleted, too, with a managed remote tier that is not wanted any more.
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# With a random password, for a managed remote tier: made, and never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [lmcache.io]
  resources: [lmcacheprofiles]
  verbs: [get, list, watch, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
# Of a managed remote tier with an issuer, where cert-manager is.
- apiGroups: [cert-manager.io]
  resources: [certificates]
  verbs: [get, list, watch, create, patch, delete]
# Deleted, too: nobody can change one, so it is made anew.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
# Deleted by force, where their nodes are gone. An annotation tells a sidecar that runs its memory tier's size.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch, delete]
- apiGroups: [""]
  resources: [pods/resize]
  verbs: [patch]
# Why pods are not there or not ready is read from Events; what happens to a cluster is told by Events.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
# Nothing is made in a namespace that is being deleted.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
{{- end }}
