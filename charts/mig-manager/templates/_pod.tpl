{{- /* Set the image of a pod in place; writes nothing. */ -}}
{{- define "mig-manager.image" -}}
{{- $values := .values }}
{{- $pod := .template.spec }}
{{- $container := first $pod.containers }}
{{- $name := regexFind "^.*:" $container.image | trimSuffix ":" }}
{{- $tag := regexFind "[^:]*$" $container.image }}
{{- $image := printf "%s:%s" ($values.image.repository | default $name) ($values.image.tag | default $tag) }}
{{- $_ := set $container "image" $image }}
{{- with $values.image.pullPolicy }}
{{- $_ := set $container "imagePullPolicy" . }}
{{- end }}
{{- with $values.imagePullSecrets }}
{{- $_ := set $pod "imagePullSecrets" . }}
{{- end }}
{{- end }}

{{- /* Change the agents' pod template in place; writes nothing. */ -}}
{{- define "mig-manager.adapt" -}}
{{- include "mig-manager.image" . }}
{{- $values := .values }}
{{- $pod := .template.spec }}
{{- $container := first $pod.containers }}
{{- with $values.resources }}
{{- $_ := set $container "resources" . }}
{{- end }}
{{- with $values.nodeSelector }}
{{- $_ := set $pod "nodeSelector" (merge . ($pod.nodeSelector | default dict)) }}
{{- end }}
{{- with $values.tolerations }}
{{- $_ := set $pod "tolerations" (concat $pod.tolerations .) }}
{{- end }}
{{- range $key := $values.startupTaints }}
{{- $_ := set $pod "tolerations" (append $pod.tolerations (dict "key" $key "operator" "Exists")) }}
{{- end }}
{{- with $values.startupTaints }}
{{- $keys := dict "name" "MIG_MANAGER_STARTUP_TAINT" "value" (join "," .) }}
{{- $_ := set $container "env" (append $container.env $keys) }}
{{- end }}
{{- if or $values.customLayouts $values.partitioner.enabled }}
{{- $custom := dict "name" "MIG_MANAGER_CUSTOM_LAYOUTS" "value" "true" }}
{{- $_ := set $container "env" (append $container.env $custom) }}
{{- end }}
{{- with $values.podAnnotations }}
{{- $_ := set $.template.metadata "annotations" (merge . ($.template.metadata.annotations | default dict)) }}
{{- end }}
{{- with $values.volumes }}
{{- $_ := set $pod "volumes" (concat $pod.volumes .) }}
{{- end }}
{{- with $values.volumeMounts }}
{{- $_ := set $container "volumeMounts" (concat $container.volumeMounts .) }}
{{- end }}
{{- with $values.runtimeClassName }}
{{- $_ := set $pod "runtimeClassName" . }}
{{- end }}
{{- if $values.maxConcurrentNodes }}
{{- $limit := dict "name" "MIG_MANAGER_MAX_CONCURRENT_NODES" "value" (toString (int $values.maxConcurrentNodes)) }}
{{- $field := dict "fieldRef" (dict "fieldPath" "metadata.namespace") }}
{{- $namespace := dict "name" "POD_NAMESPACE" "valueFrom" $field }}
{{- $_ := set $container "env" (concat $container.env (list $limit $namespace)) }}
{{- end }}
{{- include "mig-manager.env" (dict "container" $container "env" $values.env) }}
{{- end }}

{{- /* Change the partitioner's pod template in place; writes nothing. */ -}}
{{- define "mig-manager.adapt-partitioner" -}}
{{- include "mig-manager.image" . }}
{{- $own := .values.partitioner }}
{{- $pod := .template.spec }}
{{- $container := first $pod.containers }}
{{- with $own.resources }}
{{- $_ := set $container "resources" . }}
{{- end }}
{{- with $own.nodeSelector }}
{{- $_ := set $pod "nodeSelector" . }}
{{- end }}
{{- with $own.tolerations }}
{{- $_ := set $pod "tolerations" . }}
{{- end }}
{{- $env := merge (deepCopy $own.env) (dict "MIG_MANAGER_MODE" $own.mode) }}
{{- include "mig-manager.env" (dict "container" $container "env" $env) }}
{{- end }}

{{- /* Set or override variables of a container in place; writes nothing. */ -}}
{{- define "mig-manager.env" -}}
{{- $container := .container }}
{{- if .env }}
{{- $env := list }}
{{- range $variable := $container.env }}
{{- if not (hasKey $.env $variable.name) }}
{{- $env = append $env $variable }}
{{- end }}
{{- end }}
{{- range $key, $value := .env }}
{{- $env = append $env (dict "name" $key "value" $value) }}
{{- end }}
{{- $_ := set $container "env" $env }}
{{- end }}
{{- end }}
